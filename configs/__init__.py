"""TOML presets."""
