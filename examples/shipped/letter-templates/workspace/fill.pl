#!/usr/bin/perl
use strict;
use warnings;

my ($path) = @ARGV;
my %values;
open my $handle, '<', $path or die "cannot read $path: $!\n";
while (my $line = <$handle>) {
    chomp $line;
    next if $line =~ /^\s*#/;
    my ($name, $value) = split /\s*=\s*/, $line;
    $values{$name} = $value;
}
close $handle;

while (my $line = <STDIN>) {
    while ($line =~ /\{\{(\w+)\}\}/) {
        my $name = $1;
        last unless exists $values{$name};
        $line =~ s/\{\{$name\}\}/$values{$name}/;
        last;
    }
    print $line;
}
