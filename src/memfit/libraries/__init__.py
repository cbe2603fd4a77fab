"""One folder for each library: its checks, its facts, and its code for the parts of a model."""
