package activation

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func lookup(env map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		v, ok := env[name]
		return v, ok
	}
}

func TestParse(t *testing.T) {
	for _, c := range []struct {
		pid, fds, names string // "-" is none
		want            []string
		err             string
	}{
		{pid: "-", fds: "1", names: "web"},
		{pid: "8", fds: "1", names: "web"}, // of another process
		{pid: "07", fds: "1", names: "web"},
		{pid: "7", fds: "0", names: "-"},
		{pid: "7", fds: "1", names: "web", want: []string{"web"}},
		{pid: "7", fds: "3", names: "web:db:web", want: []string{"web", "db", "web"}},
		{pid: "7", fds: "2", names: "-", want: []string{"unknown", "unknown"}},
		{pid: "7", fds: "2", names: "a.socket:", want: []string{"a.socket", ""}},
		{pid: "7", fds: "2", names: "web", err: "LISTEN_FDNAMES has 1 names for the 2 sockets"},
		{pid: "7", fds: "1", names: "a:b", err: "LISTEN_FDNAMES has 2 names for the 1 sockets"},
		{pid: "7", fds: "-", names: "web", err: `LISTEN_FDS ""`},
		{pid: "7", fds: "-1", names: "web", err: `LISTEN_FDS "-1"`},
		{pid: "7", fds: "4097", names: "-", err: `LISTEN_FDS "4097"`},
		{pid: "7", fds: strings.Repeat("9", 100), names: "-", err: "is not a number of sockets"},
	} {
		env := map[string]string{"LISTEN_PID": c.pid, "LISTEN_FDS": c.fds, "LISTEN_FDNAMES": c.names}
		for k, v := range env {
			if v == "-" {
				delete(env, k)
			}
		}
		got, err := parse(lookup(env), 7)
		if !slices.Equal(got, c.want) || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%+v: got %q, %v", c, got, err)
		}
	}
}

// What is passed to another process is not used, and no child hears of it either.
func TestVariablesAreRemoved(t *testing.T) {
	for _, name := range variables {
		t.Setenv(name, "1")
	}
	t.Setenv("LISTEN_PID", strconv.Itoa(os.Getpid()+1))
	s := FromEnvironment()
	for _, name := range variables {
		if v, ok := os.LookupEnv(name); ok {
			t.Errorf("%s is still %q", name, v)
		}
	}
	_, err := s.Listen("web")
	if err == nil || !strings.Contains(err.Error(), "no sockets were passed to this process") {
		t.Errorf("got %v", err)
	}
}

func TestNamesInErrorsAreBounded(t *testing.T) {
	s := &Sockets{}
	for i := range 15 {
		s.names = append(s.names, fmt.Sprint("n", i))
	}
	_, err := s.Listen("web")
	if err == nil || !strings.Contains(err.Error(), `"n0", "n1", `) || !strings.HasSuffix(err.Error(), `"n9", 5 more`) {
		t.Errorf("got %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("2", "web:db")
	f.Add("4096", "")
	f.Add("", ":")
	f.Fuzz(func(t *testing.T, fds, names string) {
		got, err := parse(lookup(map[string]string{"LISTEN_PID": "7", "LISTEN_FDS": fds, "LISTEN_FDNAMES": names}), 7)
		if err != nil && got != nil || len(got) > maxFDs {
			t.Fatalf("got %d names, %v", len(got), err)
		}
		if len(got) > 0 && strings.Join(got, ":") != names {
			t.Fatalf("got %q of %q", got, names)
		}
	})
}
