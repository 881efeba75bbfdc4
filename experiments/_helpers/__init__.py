"""Code that several experiments share, or that keeps one of them short."""
