check:
	$(CC) -std=c11 -Wall -I. -g -o hidden_tests/check hidden_tests/check.c ring.c
	./hidden_tests/check
