#!/usr/bin/perl
use strict;
use warnings;
use POSIX qw(mktime strftime);

my ($start, $days, $file) = @ARGV;
my %holidays;
if ($file) {
    open my $handle, '<', $file or die "cannot read $file\n";
    while (<$handle>) {
        chomp;
        $holidays{$_} = 1;
    }
}

my ($year, $month, $day) = split /-/, $start;
my $time = mktime(0, 0, 0, $day, $month - 1, $year - 1900);
while ($days > 0) {
    $time += 86400;
    my $date = strftime('%Y-%m-%d', localtime $time);
    next if (localtime $time)[6] == 0 || $holidays{$date};
    $days--;
}
print strftime('%Y-%m-%d', localtime $time), "\n";
