from t2r.cli import main

main()
