"""Other loaders on the rows of the macro benchmark, each in an environment of its own."""
