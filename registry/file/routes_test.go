package file

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"culvert.dev/registry"
)

func TestParseRoute(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"a.example.com=10.0.0.1:443", "a.example.com [] 10.0.0.1:443"},
		{"a.example.com:443=10.0.0.1:8443", "a.example.com [443] 10.0.0.1:8443"},
		{"*.Example.com.=localhost:1", "*.example.com [] localhost:1"},
		{"bücher.example=[2001:db8::1]:1", "xn--bcher-kva.example [] [2001:db8::1]:1"},
		{"a.example.com", `error route "a.example.com" has no =: write NAME[:PORT]=HOST:PORT`},
		{"a.example.com=10.0.0.1", "error the endpoint has no port; write HOST:PORT"},
		{"a.example.com:0=10.0.0.1:1", `error port "0"`},
		{"a.example.com:https=10.0.0.1:1", `error port "https"`},
		{"=10.0.0.1:1", "error name is empty"},
		{"*=10.0.0.1:1", "error route \"*=10.0.0.1:1\": it is every name; name a domain: *.example.com"},
		{"a.example.com=", "error name is empty"},
		{"10.0.0.1=10.0.0.1:1", "error name is an address"},
		{"a.example.com=b=c:1", "error name has a byte"},
	} {
		s, err := ParseRoute(tt.in)
		if err != nil {
			s = &registry.Service{}
		}
		got := fmt.Sprint(s.Name, " ", s.Ports)
		for _, ep := range s.Endpoints {
			got += " " + ep.String()
		}
		if err != nil {
			got = "error " + err.Error()
			if text, ok := strings.CutPrefix(tt.want, "error "); ok && strings.Contains(got, text) {
				continue
			}
		}
		if got != tt.want {
			t.Errorf("ParseRoute(%q) = %s, want %s", tt.in, got, tt.want)
		}
		if err == nil && (!s.Exposed || s.Origin != "--route "+tt.in) {
			t.Errorf("ParseRoute(%q): %+v, want it exposed, with its origin", tt.in, s)
		}
	}
}

func TestParseRoutes(t *testing.T) {
	services, err := ParseRoutes("/etc/routes.txt", []byte(`
# the shop
orders.example.com:443	10.0.0.1:8443   # one
orders.example.com:443  10.0.0.2:8443
Orders.example.com.:443 10.0.0.1:8443
orders.example.com      10.0.0.3:8443
*.example.com localhost:9000`+"\r\n"))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range services {
		got = append(got, fmt.Sprint(s.Name, s.Ports, s.Endpoints, s.Origin))
	}
	want := []string{
		"orders.example.com[443] [10.0.0.1:8443 10.0.0.2:8443]routes.txt:3",
		"orders.example.com[] [10.0.0.3:8443]routes.txt:6",
		"*.example.com[] [localhost:9000]routes.txt:7",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	if _, err := registry.Merge(registry.Snapshot{Services: services}); err != nil {
		t.Error(err)
	}

	_, err = ParseRoutes("routes.txt", []byte("a.example.com 10.0.0.1:1\n a..b 10.0.0.1:1\nücher.example 10.0.0.1 # x\na.example.com:0 b\n\ta b c\nalone\n"))
	wantErr := []string{
		"routes.txt:2:2: ", "routes.txt:3:15: ", "the endpoint has no port; write HOST:PORT", "routes.txt:4:1: ", `port "0"`,
		"routes.txt:5:2: a route has 2 fields, and this line 3; write NAME[:PORT] HOST:PORT", "routes.txt:6:1: ",
	}
	for _, w := range wantErr {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("errors lack %q:\n%v", w, err)
		}
	}
	var errs Errors
	if !errors.As(err, &errs) || len(errs) != 5 {
		t.Errorf("%d errors, want 5", len(errs))
	}
}

func TestJoinRoutesKeepsItsInput(t *testing.T) {
	a, _ := ParseRoute("a.example.com=10.0.0.1:1")
	a.Endpoints = append(make([]registry.Endpoint, 0, 8), a.Endpoints...)
	b, _ := ParseRoute("a.example.com=10.0.0.2:1")
	in := []*registry.Service{a, b}
	if got := JoinRoutes(in); len(got) != 1 || len(got[0].Endpoints) != 2 {
		t.Errorf("joined: %+v", got)
	}
	if spare := in[0].Endpoints[:2][1]; spare != (registry.Endpoint{}) {
		t.Errorf("the input's memory was written to: %v", spare)
	}
}

func manyRoutes(n int) []byte {
	var b bytes.Buffer
	for i := range n {
		fmt.Fprintf(&b, "svc-%d.example.com:443 10.%d.%d.%d:8443\n", i, i>>16, i>>8&0xff, i&0xff)
	}
	return b.Bytes()
}

func BenchmarkParseRoutes(b *testing.B) {
	data := manyRoutes(100_000)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ParseRoutes("routes.txt", data); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkParse(b *testing.B) {
	var buf bytes.Buffer
	buf.WriteString("services:\n")
	for i := range 100_000 {
		fmt.Fprintf(&buf, "  - name: svc-%d.example.com\n    ports: [443]\n    endpoints: [\"10.0.0.1:8443\"]\n", i)
	}
	for b.Loop() {
		if _, err := Parse("services.yaml", buf.Bytes()); err != nil {
			b.Fatal(err)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, pattern := range []string{"testdata/good/*.yaml", "testdata/bad/*.yaml"} {
		files, _ := filepath.Glob(pattern)
		for _, name := range files {
			data, err := os.ReadFile(name)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		lines := bytes.Count(data, []byte("\n")) + bytes.Count(data, []byte("\r")) + 1
		cfg, err := Parse("fuzz.yaml", data)
		if err == nil {
			// What loads is understood in full: it makes a table without conflicts.
			if _, err := cfg.Mesh.Merge(cfg.Snapshot()); err != nil && !strings.Contains(err.Error(), registry.Clusterset) {
				t.Errorf("loaded with conflicts: %v", err)
			}
			for _, s := range cfg.Services {
				if len(s.Names) == 0 && s.ID.Service == "" || len(s.Endpoints)+len(s.Via) == 0 || s.ExposedTo != nil && len(s.ExposedTo) == 0 {
					t.Errorf("loaded a service that is not whole: %+v", s)
				}
			}
			return
		}
		var errs Errors
		if !errors.As(err, &errs) || len(errs) == 0 || len(errs) > maxErrors {
			t.Fatalf("%T with %d errors", err, len(errs))
		}
		for _, e := range errs {
			if e.Line < 1 || e.Column < 1 || e.Msg == "" || e.Line > lines+2 {
				t.Errorf("an error without a place: %+v in %d lines", e, lines)
			}
		}
	})
}

func FuzzParseRoutes(f *testing.F) {
	f.Add([]byte("a.example.com:443 10.0.0.1:8443 # x\n*.b.example 10.0.0.1:1\n"))
	f.Add([]byte("a b c\n\x00 :0\n[::1]:1 [::1]:1\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		services, err := ParseRoutes("routes.txt", data)
		if err != nil {
			return
		}
		if _, err := registry.Merge(registry.Snapshot{Services: services}); err != nil {
			t.Errorf("loaded with conflicts: %v", err)
		}
	})
}
