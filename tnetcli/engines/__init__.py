"""Ways to run one function over many images."""
