"""Publishers, one file each: facts from the publisher's repository that the rows lack, each with
its source."""
