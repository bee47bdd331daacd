"""What each mechanism against slow samples gains, added one at a time."""
