source <(hasten completion bash 2> /dev/null)
