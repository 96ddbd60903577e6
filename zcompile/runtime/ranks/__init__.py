"""What crosses between the ranks that train one model together."""
