"""radixrt inside other programs."""
