"""Publishers, a file each: what is not in a row but in the publisher's own repository, with where
it stands there."""
