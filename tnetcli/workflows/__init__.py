"""What a user does, one module per thing."""
