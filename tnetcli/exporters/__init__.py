"""From records of predictions to files that other programs show."""
