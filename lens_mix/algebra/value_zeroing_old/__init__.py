"""How Value Zeroing is computed by algebra: changes carried through a block, piece by piece."""
