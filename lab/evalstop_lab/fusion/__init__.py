"""Fitting fusion: what its members make of labeled runs, a model of that, and how it does on families left out."""
