"""The functions that the command line and Python share: `verbs.py` has the table of them."""
