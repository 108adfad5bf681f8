"""What runs on the ranks: launching them, and everything a rewritten graph calls there."""
