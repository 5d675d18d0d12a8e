NR == 1 {
    for (i = 1; i <= NF; i++)
        if ($i == column)
            at = i
    next
}

{
    value = $at
    sum += value
    values[n++] = value
    if (value > max) max = value
    if (value < min) min = value
}

END {
    print "count: " n
    print "min: " min
    print "median: " values[int(n / 2)]
    print "max: " max
    print "mean: " sum / n
}
