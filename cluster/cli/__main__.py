from cluster.cli.app import main

main()
