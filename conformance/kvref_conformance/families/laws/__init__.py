"""What holds for every cache, whatever it is: each law is checked on all families that say what it needs to know of them."""
