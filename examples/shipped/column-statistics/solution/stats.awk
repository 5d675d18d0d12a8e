BEGIN {
    FS = "\t"
}

{
    sub(/\r$/, "")
}

NR == 1 {
    for (i = 1; i <= NF; i++)
        if ($i == column)
            at = i
    if (!at)
        exit
    next
}

{
    cell = $at
    gsub(/^[ \t]+|[ \t]+$/, "", cell)
    if (cell == "")
        next
    if (cell !~ /^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$/) {
        skipped++
        next
    }
    values[++n] = cell + 0
    sum += cell
}

# heap sort of values[1..n]
function sink(root, end,    child, held) {
    held = values[root]
    while ((child = 2 * root) <= end) {
        if (child < end && values[child + 1] > values[child])
            child++
        if (values[child] <= held)
            break
        values[root] = values[child]
        root = child
    }
    values[root] = held
}

function sort(    i, held) {
    for (i = int(n / 2); i >= 1; i--)
        sink(i, n)
    for (i = n; i > 1; i--) {
        held = values[1]
        values[1] = values[i]
        values[i] = held
        sink(1, i - 1)
    }
}

END {
    if (!at) {
        print "no column: " column | "cat 1>&2"
        close("cat 1>&2")
        exit 2
    }
    printf "count: %d\n", n
    if (n) {
        sort()
        printf "min: %.6g\n", values[1]
        printf "median: %.6g\n", (values[int((n + 1) / 2)] + values[int(n / 2) + 1]) / 2
        printf "max: %.6g\n", values[n]
        printf "mean: %.6g\n", sum / n
    }
    if (skipped)
        printf "skipped: %d\n", skipped
}
