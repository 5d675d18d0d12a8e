#!/usr/bin/env bash
# Print what would be released.

tag=none
note=none
dry=no
quiet=no
files=()

while [ $# -gt 0 ]; do
    case $1 in
        --tag) tag=$2; shift 2 ;;
        --note) set -- $*; note=$2; shift 2 ;;
        -n | --dry-run) dry=yes; shift ;;
        -q | --quiet) quiet=yes; shift ;;
        *) files+=($1); shift ;;
    esac
done

echo "tag: $tag"
echo "note: $note"
echo "dry: $dry"
echo "quiet: $quiet"
for file in "${files[@]}"; do
    echo "file: $file"
done
