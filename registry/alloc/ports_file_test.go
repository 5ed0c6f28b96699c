package alloc

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

var samplePorts = []Port{
	{PortKey: PortKey{"tcp", "db.example.com", 5432}, Assigned: 20017, Since: noon},
	{PortKey: PortKey{"tcp", "mail.example.com", 0}, Assigned: 20018, Since: noon, Gone: noon.Add(time.Hour)},
	{PortKey: PortKey{"udp", "db.example.com", 5432}, Assigned: 20017, Since: noon.Add(time.Nanosecond)},
}

func TestPortFile(t *testing.T) {
	s := PortFile(filepath.Join(t.TempDir(), "ports.json"))
	if got, err := s.Load(); got != nil || err != nil {
		t.Errorf("without a file: got %v, %v, want nothing", got, err)
	}
	for _, want := range [][]Port{samplePorts, nil, samplePorts[:1]} {
		if err := s.Save(want); err != nil {
			t.Fatal(err)
		}
		if got, err := s.Load(); !slices.Equal(got, want) || err != nil {
			t.Errorf("got %v, %v, want %v", got, err, want)
		}
	}
	data, err := os.ReadFile(s.Path)
	want := `{"version": 1, "ports": [
  {"protocol":"tcp","service":"db.example.com","port":5432,"assigned":20017,"since":"2026-03-01T12:00:00Z"}
]}
`
	if string(data) != want || err != nil {
		t.Errorf("got %s, %v, want %s", data, err, want)
	}
	if info, err := os.Stat(s.Path); err != nil || runtime.GOOS != "windows" && info.Mode() != 0o600 {
		t.Errorf("mode %v, %v, want 0600", info.Mode(), err)
	}
	wantFiles(t, s.Path, "ports.json")
}

// wantFiles checks that nothing lies beside path.
func wantFiles(t *testing.T, path string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(path))
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if !slices.Equal(got, want) || err != nil {
		t.Errorf("files: got %q, %v, want %q", got, err, want)
	}
}

func TestFileFollowsALink(t *testing.T) {
	dir := t.TempDir()
	link, real := filepath.Join(dir, "link.json"), filepath.Join(dir, "real.json")
	s := PortFile(link)
	if err := PortFile(real).Save(nil); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("real.json", link); err != nil {
		t.Fatal(err)
	}
	if err := s.Save(samplePorts); err != nil {
		t.Fatal(err)
	}
	if got, err := PortFile(real).Load(); !slices.Equal(got, samplePorts) || err != nil {
		t.Errorf("behind the link: %v, %v", got, err)
	}
	if info, err := os.Lstat(link); err != nil || info.Mode().Type() != fs.ModeSymlink {
		t.Errorf("the link was replaced: %v, %v", info, err)
	}
}

// What somebody left who was killed is in nobody's way, and a link that stands
// there is not followed.
func TestFileAfterAKill(t *testing.T) {
	dir := t.TempDir()
	s, other := PortFile(filepath.Join(dir, "ports.json")), filepath.Join(dir, "other")
	if err := os.WriteFile(other, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, leave := range []func() error{
		func() error { return os.WriteFile(s.Path+".new", []byte("{"), 0o644) },
		func() error { return os.Symlink(other, s.Path+".new") },
	} {
		if err := leave(); err != nil {
			t.Fatal(err)
		}
		if err := s.Save(samplePorts); err != nil {
			t.Fatal(err)
		}
		if got, err := s.Load(); !slices.Equal(got, samplePorts) || err != nil {
			t.Errorf("got %v, %v", got, err)
		}
		if info, err := os.Lstat(s.Path); err != nil || info.Mode() != 0o600 {
			t.Errorf("mode %v, %v, want 0600 of a regular file", info.Mode(), err)
		}
	}
	if data, _ := os.ReadFile(other); string(data) != "mine" {
		t.Errorf("the file that a link led to is %q", data)
	}
	wantFiles(t, s.Path, "other", "ports.json")
}

// A file that can't be written leaves the one that is there, and nothing else.
func TestFileNotWritten(t *testing.T) {
	dir := t.TempDir()
	s := PortFile(filepath.Join(dir, "ports.json"))
	if err := os.Mkdir(s.Path, 0o700); err != nil { // a rename can't replace it, whoever asks
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.Path, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err := s.Save(samplePorts)
	if err == nil || !strings.HasPrefix(err.Error(), "write the assigned ports: ") {
		t.Errorf("got %v, want write the assigned ports: ...", err)
	}
	wantFiles(t, s.Path, "ports.json")
	if err := PortFile(filepath.Join(dir, "missing", "ports.json")).Save(samplePorts); err == nil || !strings.Contains(err.Error(), "missing") {
		t.Errorf("in a folder that is not there: %v", err)
	}
}

// A state that can't be understood is refused as a whole: nobody's port is
// given anew by itself.
func TestPortFileRefused(t *testing.T) {
	entry := func(text string) string { return `{"version": 1, "ports": [` + text + `]}` }
	const one = `{"protocol": "tcp", "service": "a", "assigned": 20001, "since": "2026-03-01T12:00:00Z"}`
	for _, tt := range []struct{ name, text, want string }{
		{"empty", "", "it is empty"},
		{"blank", " \n", "it is empty"},
		{"cut", entry(one)[:60], "unexpected end of JSON input"},
		{"zeros", "\x00\x00\x00\x00", "line 1: invalid character '\\x00'"},
		{"not JSON", "{\n  version: 1\n}", "line 2: invalid character 'v'"},
		{"two documents", entry(one) + "\n" + entry(one), "line 2: invalid character '{' after top-level value"},
		{"a list", "[]", "cannot unmarshal array"},
		{"no version", `{"ports": []}`, "it has no version"},
		{"version 2", `{"version": 2, "ports": {}}`, "it is of version 2, and this culvert reads version 1"},
		{"version of text", `{"version": "1"}`, "cannot unmarshal string"},
		{"unknown key", `{"version": 1, "prots": []}`, `unknown field "prots"`},
		{"unknown key of an entry", entry(`{"protocol": "tcp", "color": 1}`), `unknown field "color"`},
		{"protocol", entry(`{"protocol": "sctp", "service": "a", "assigned": 20001}`), `entry 1 has the protocol "sctp"`},
		{"no service", entry(one + `, {"protocol": "tcp", "assigned": 20002}`), "entry 2 names no service"},
		{"no port", entry(`{"protocol": "tcp", "service": "a", "port": 1}`), "entry 1, tcp a:1, has no assigned port"},
		{"port too large", entry("\n" + `{"protocol": "tcp", "service": "a", "assigned": 70000}`), "line 2: json: cannot unmarshal number 70000"},
		{"time", entry(`{"protocol": "tcp", "service": "a", "assigned": 20001, "since": "yesterday"}`), "yesterday"},
		{"service twice", entry(one + "," + strings.Replace(one, "20001", "20002", 1)), "entry 2, tcp a, is there twice"},
		{"port twice", entry(one + "," + strings.Replace(one, `"a"`, `"b"`, 1)), "entry 2, tcp b, has port 20001, which is assigned to tcp a"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := PortFile(filepath.Join(t.TempDir(), "ports.json"))
			if err := os.WriteFile(s.Path, []byte(tt.text), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := s.Load()
			if err == nil || got != nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), fmt.Sprintf("%q can't be used", s.Path)) {
				t.Errorf("got %v, %v\nwant %q", got, err, tt.want)
			}
		})
	}
	if _, err := PortFile(t.TempDir()).Load(); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a folder: %v", err)
	}
	big := PortFile(filepath.Join(t.TempDir(), "big"))
	if err := os.WriteFile(big.Path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(big.Path, MaxFileSize+1); err != nil {
		t.Fatal(err)
	}
	if _, err := big.Load(); err == nil || !strings.Contains(err.Error(), "larger than the limit") {
		t.Errorf("too large: %v", err)
	}
}

// Whatever is in a file, it is refused or kept as it is by writing and reading.
func FuzzPortFile(f *testing.F) {
	good, err := PortFile("").encode([]Port{{PortKey: PortKey{"tcp", "a", 1}, Assigned: 2, Since: noon}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"version": 1, "ports": [{"protocol":"udp","service":"b","assigned":1,"since":"2026-03-01T12:00:00+01:00","gone":"0001-01-01T00:00:00Z"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		all, err := parsePorts(data)
		if err != nil {
			return
		}
		ports := map[string]bool{}
		for _, a := range all {
			at := fmt.Sprint(a.Protocol, a.Assigned)
			if a.Assigned == 0 || a.Service == "" || ports[at] {
				t.Errorf("accepted %+v", a)
			}
			ports[at] = true
		}
	})
}
