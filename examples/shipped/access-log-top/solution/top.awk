# requests, bytes, path
{
    # the request is what stands in quotes after the time in brackets
    if (!match($0, /\] "[^"]*" [0-9]+ ([0-9]+|-)[ \r]*$/))
        next
    tail = substr($0, RSTART + 3)
    split(tail, halves, "\"")
    split(halves[1], request, " ")
    split(halves[2], answer, " ")
    if (answer[1] >= 400)
        next
    path = request[2]
    sub(/\?.*/, "", path)
    count[path]++
    bytes[path] += answer[2]
    requests++
    sent += answer[2]
}

END {
    sorted = "LC_ALL=C sort -t '\t' -k1,1nr -k3"
    for (path in count)
        printf "%d\t%d\t%s\n", count[path], bytes[path], path | sorted
    close(sorted)
    printf "%d\t%d\ttotal\n", requests, sent
}
