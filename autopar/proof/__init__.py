"""Proofs: the parallel program computes what the serial one computes."""
