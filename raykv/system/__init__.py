"""How raykv uses the operating system and the compiler."""
