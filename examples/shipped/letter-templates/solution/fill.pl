#!/usr/bin/perl
use strict;
use warnings;

my ($path) = @ARGV;
my %values;
open my $handle, '<', $path or die "cannot read $path: $!\n";
while (my $line = <$handle>) {
    chomp $line;
    next if $line =~ /^\s*#/;
    my ($name, $value) = $line =~ /^\s*(\w+)\s*=\s*(.*?)\s*$/ or next;
    $values{$name} = $value;
}
close $handle;

my %unknown;

sub filled {
    my ($written, $name, $default) = @_;
    my $value = $values{$name};
    return $value if defined $value && ($value ne '' || !defined $default);
    return $default if defined $default;
    $unknown{$name} = 1;
    return $written;
}

while (my $line = <STDIN>) {
    $line =~ s/(\{\{\s*(\w+)\s*(?:\|\s*([^{}]*?)\s*)?\}\})/filled($1, $2, $3)/ge;
    print $line;
}
print STDERR "unknown: $_\n" for sort keys %unknown;
exit(%unknown ? 1 : 0);
