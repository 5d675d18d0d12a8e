# requests, bytes, path
{
    path = $7
    count[path]++
    bytes[path] += $10
}

END {
    for (path in count)
        printf "%d\t%d\t%s\n", count[path], bytes[path], path | "sort -rn"
}
