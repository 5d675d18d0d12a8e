#!/usr/bin/env bash
# Print what would be released.

tag=none
note=none
dry=no
quiet=no
files=()

while [ $# -gt 0 ]; do
    case $1 in
        --tag | --note)
            if [ $# -lt 2 ]; then
                echo "$1 needs a value" >&2
                exit 2
            fi
            if [ "$1" = --tag ]; then tag=$2; else note=$2; fi
            shift 2
            ;;
        --tag=*) tag=${1#*=}; shift ;;
        --note=*) note=${1#*=}; shift ;;
        -n | --dry-run) dry=yes; shift ;;
        -q | --quiet) quiet=yes; shift ;;
        --) shift; files+=("$@"); break ;;
        -[nq]?*) first=${1:0:2}; rest=-${1:2}; shift; set -- "$first" "$rest" "$@" ;;
        --*) echo "unknown option: $1" >&2; exit 2 ;;
        -?*) echo "unknown option: ${1:0:2}" >&2; exit 2 ;;
        *) files+=("$1"); shift ;;
    esac
done

echo "tag: $tag"
echo "note: $note"
echo "dry: $dry"
echo "quiet: $quiet"
for file in "${files[@]}"; do
    echo "file: $file"
done
