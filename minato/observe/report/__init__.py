"""What a loader has measured, in figures, words and pictures."""
