"""The Flax modules: decoder backbone, drafter and their layers."""
