#!/usr/bin/perl
use strict;
use warnings;

my ($start, $days, $file) = @ARGV;

sub refuse {
    print STDERR "due: $_[0]\n";
    exit 2;
}

sub length_of {
    my ($year, $month) = @_;
    return 29 if $month == 2 && $year % 4 == 0 && ($year % 100 != 0 || $year % 400 == 0);
    return (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[$month - 1];
}

sub date {
    my ($text) = @_;
    my ($year, $month, $day) = ($text // '') =~ /\A([0-9]{4})-([0-9]{2})-([0-9]{2})\z/
        or refuse('not a date: ' . ($text // ''));
    refuse("not a date: $text") if $month < 1 || $month > 12 || $day < 1 || $day > length_of($year, $month);
    return ($year, $month, $day);
}

# 0 is Sunday
sub weekday {
    my ($year, $month, $day) = @_;
    my @shift = (0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4);
    $year-- if $month < 3;
    return ($year + int($year / 4) - int($year / 100) + int($year / 400) + $shift[$month - 1] + $day) % 7;
}

my ($year, $month, $day) = date($start);
refuse('not a whole number: ' . ($days // '')) unless ($days // '') =~ /\A[+-]?[0-9]+\z/;

my %holidays;
if (defined $file) {
    open my $handle, '<', $file or refuse("cannot read $file: $!");
    while (my $line = <$handle>) {
        $line =~ s/#.*//s;
        $line =~ s/\A\s+|\s+\z//g;
        next if $line eq '';
        date($line =~ /\A[0-9]{2}-[0-9]{2}\z/ ? "2024-$line" : $line);
        $holidays{$line} = 1;
    }
}

my $weekday = weekday($year, $month, $day);

sub works {
    return 0 if $weekday == 0 || $weekday == 6;
    my $short = sprintf '%02d-%02d', $month, $day;
    return !$holidays{$short} && !$holidays{sprintf('%04d-', $year) . $short};
}

sub step {
    my ($by) = @_;
    $weekday = ($weekday + $by) % 7;
    $day += $by;
    if ($day > length_of($year, $month)) {
        $day = 1;
        ($year, $month) = $month == 12 ? ($year + 1, 1) : ($year, $month + 1);
    } elsif ($day < 1) {
        ($year, $month) = $month == 1 ? ($year - 1, 12) : ($year, $month - 1);
        $day = length_of($year, $month);
    }
}

if ($days == 0) {
    step(1) until works();
}
my $by = $days < 0 ? -1 : 1;
for (my $left = abs $days; $left > 0;) {
    step($by);
    $left-- if works();
}
printf "%04d-%02d-%02d\n", $year, $month, $day;
