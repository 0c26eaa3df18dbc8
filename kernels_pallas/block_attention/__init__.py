"""Attention of a block of queries over a cached context and the block itself."""
