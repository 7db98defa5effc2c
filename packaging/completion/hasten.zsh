#compdef hasten
source <(hasten completion zsh 2> /dev/null)
_hasten "$@"
