"""Which entry rests where, and every way its bytes travel."""
