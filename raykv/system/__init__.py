"""What raykv needs of the operating system and the compiler."""
