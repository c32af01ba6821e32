"""From strings to rows of tokens: encoding, and packing documents into rows."""
