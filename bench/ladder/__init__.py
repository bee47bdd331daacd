"""What each of Petastorm's steps gains, in minato and in Petastorm itself."""
