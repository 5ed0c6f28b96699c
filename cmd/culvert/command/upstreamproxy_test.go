package command

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// TestMain's program again, as the commands that tests of runCommand start.
func TestCommandHelper(t *testing.T) {
	switch os.Getenv("CULVERT_TEST_COMMAND") {
	case "writes":
		_, _ = os.Stdout.WriteString("secret\n")
	case "floods":
		for range 1 << 10 {
			_, _ = os.Stdout.WriteString("secret secret\n")
		}
	case "fails":
		_, _ = os.Stdout.WriteString("secret\n")
		_, _ = os.Stderr.WriteString("secret\n")
		os.Exit(3)
	case "hangs":
		select {}
	case "":
		return
	}
	os.Exit(0)
}

// A command has a limit of bytes and of time, and no error has what it wrote.
func TestRunCommand(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for what, want := range map[string]string{
		"writes": "", "floods": "writes more than 100 bytes", "fails": "exit status 3", "hangs": "did not end in time",
	} {
		ctx, cancel := t.Context(), func() {}
		if what == "hangs" {
			ctx, cancel = context.WithTimeout(ctx, 200*time.Millisecond)
		}
		t.Setenv("CULVERT_TEST_COMMAND", what)
		out, err := runCommand(ctx, []string{self, "-test.run=^TestCommandHelper$"}, 100)
		cancel()
		if want == "" {
			if err != nil || string(out) != "secret\n" {
				t.Errorf("%s: got %q and %v", what, out, err)
			}
			continue
		}
		if err == nil || len(out) > 0 || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: got %q and %v, want an error with %q and nothing of the output", what, out, err, want)
		}
	}
	if _, err := runCommand(t.Context(), []string{"culvert-there-is-none"}, 100); err == nil || !strings.Contains(err.Error(), exec.ErrNotFound.Error()) {
		t.Errorf("a command that is not there: %v", err)
	}
}
