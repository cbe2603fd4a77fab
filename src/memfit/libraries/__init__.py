"""What memfit knows of each library, in a folder of its own: its checks and facts, and its own code
for a model's pieces."""
