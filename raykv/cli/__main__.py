"""python -m raykv.cli"""

from raykv.cli.main import main

main()
