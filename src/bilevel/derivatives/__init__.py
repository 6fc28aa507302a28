"""Call the user's functions and differentiate them."""
