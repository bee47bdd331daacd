"""What is measured: clocks and histograms, written by every stage, read by reports."""
