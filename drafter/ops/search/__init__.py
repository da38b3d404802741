"""Finding the locus of a suffix: the interval of a suffix array whose suffixes begin with it."""
