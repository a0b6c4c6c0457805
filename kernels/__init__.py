"""The operations of the runtime; `reference` holds their definitions in plain torch."""
