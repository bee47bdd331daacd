"""Each case goes through torch's loader and through minato's, and everything that a program can see is compared."""
