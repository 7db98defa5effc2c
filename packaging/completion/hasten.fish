hasten completion fish 2> /dev/null | source
