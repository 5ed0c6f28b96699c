package file

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"culvert.dev/registry"
)

// again parses before and then after by what is known of before. It is nil
// where that is of no help.
func again(before, after []byte) *decoder {
	d := parse("a.yaml", before)
	d.keepDigests(before, splitServices(before, 0))
	if len(d.errs) > 0 {
		return nil
	}
	return parseChanged("a.yaml", after, &d.cfg)
}

// wantSame compares what parseChanged made of data with what parse makes of it.
func wantSame(t *testing.T, got *decoder, data []byte) {
	t.Helper()
	want := parse("a.yaml", data)
	if err := want.errs.sorted(); err != nil {
		t.Fatalf("what is wrong was read again without a complaint: %v\n%s", err, data)
	}
	want.keepDigests(data, splitServices(data, 0))
	if !reflect.DeepEqual(got.cfg, want.cfg) {
		t.Errorf("read again:\n%+v\nread:\n%+v\nfrom\n%s", got.cfg, want.cfg, data)
	}
}

const (
	around1 = "# a gateway\nlisteners:\n  - address: :8443\nservices: # all of them\n"
	around2 = "drain: {timeout: 20s}\n"
)

func TestReloadParsesWhatChanged(t *testing.T) {
	a := "  - name: a.test\n    endpoints: [\"10.0.0.1:1\"]\n"
	b := "  # the second\n\n  - {name: b.test, endpoints: [\"10.0.0.2:1\"]}\n"
	c := "  - names:\n    - c.test\n    - d.test\n    endpoints:\n    - 10.0.0.3:1\n"
	before := around1 + a + b + c + around2
	for _, row := range []struct {
		name, after string
		again       bool
	}{
		{"nothing", before, true},
		{"a service changes", strings.Replace(before, "10.0.0.1:1", "10.0.0.1:2", 1), true},
		{"the last one changes", strings.Replace(before, "10.0.0.3:1", "10.0.0.3:2", 1), true},
		{"one comes", around1 + a + strings.ReplaceAll(a, "a.test", "x.test") + b + c + around2, true},
		{"one goes", around1 + a + c + around2, true},
		{"the last one goes", around1 + a + b + around2, true},
		{"they change places", around1 + c + b + a + around2, true},
		{"a comment comes", around1 + a + "    # a word\n" + b + c + around2, true},
		{"with CRLF", strings.ReplaceAll(before, "\n", "\r\n"), false},
		{"what is around changes", before + "log: {level: warn}\n", false},
		{"the indentation changes", around1 + strings.TrimPrefix(a, "  "), false},
		{"a mistake", strings.Replace(before, "10.0.0.2:1", "10.0.0.2:0", 1), false},
		{"a name twice", strings.Replace(before, "a.test", "b.test", 1), false},
		{"a list within the list", around1 + a + "  -\n    - x\n" + around2, false},
		{"a quote that takes in the next one", around1 + "  - name: \"x\n" + b + c + around2, false},
		{"a flow that takes in the next one", around1 + "  - {name: x.test, endpoints: [\"10.0.0.9:1\"\n" + b + c + around2, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			d := again([]byte(before), []byte(row.after))
			if (d != nil) != row.again {
				t.Fatalf("read by what was known: %v, want %v", d != nil, row.again)
			}
			if d != nil {
				wantSame(t, d, []byte(row.after))
			}
		})
	}
}

// What a hop names is read into its own service, though those before it were not
// read again.
func TestReloadReadsFilesOfHops(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const text = "services:\n- name: a.example\n  endpoints: [10.0.0.1:1]\n- name: b.example\n  endpoints: [10.0.0.2:1]\n" +
		"- name: c.example\n  ports: [1]\n  via: [{connect: \"https://gw.example:1\", userFile: user}]\n"
	write("user", "gw:first")
	write("culvert.yaml", text)
	path := filepath.Join(dir, "culvert.yaml")
	before, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	write("user", "gw:second")
	after, err := Reload(path, before)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(after.Services[2].Via[0].Password); got != "second" {
		t.Errorf("password %q after it has changed, want the second", got)
	}
}

// Services that were not read again are those that were, not copies.
func TestReloadKeepsUnchangedServices(t *testing.T) {
	var b strings.Builder
	b.WriteString("services:\n")
	for i := range 1000 {
		fmt.Fprintf(&b, "  - name: s%d.test\n    endpoints: [\"10.0.0.1:%d\"]\n", i, i+1)
	}
	path := filepath.Join(t.TempDir(), "culvert.yaml")
	write := func(s string) {
		if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(b.String())
	first, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if same, err := Reload(path, first); same != first || err != nil {
		t.Errorf("nothing changed: got another configuration, %v", err)
	}
	write(strings.Replace(b.String(), "  - name: s500.test\n", "  # one more line\n  - name: s500.test\n", 1))
	second, err := Reload(path, first)
	if err != nil || second == first {
		t.Fatalf("a line more: got the same configuration, %v", err)
	}
	for _, i := range []int{0, 498, 501, 998} {
		a, b := first.Services[i], second.Services[i]
		if &a.Endpoints[0] != &b.Endpoints[0] {
			t.Errorf("service %d was read again", i)
		}
	}
	if got, want := second.Services[501].Origin, "culvert.yaml:1005"; got != want {
		t.Errorf("a service further down has origin %s, want %s", got, want)
	}
}

// FuzzReload changes a file and reads it by what was known of it before:
// the same must come out as if it were read for the first time.
func FuzzReload(f *testing.F) {
	files, _ := filepath.Glob("testdata/good/*.yaml")
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, uint16(len(data)/2), uint8(3), "x")
		f.Add(data, uint16(len(data)/3), uint8(0), "\n  - ")
	}
	f.Add([]byte("services:\n- name: a.test # it\"s\n  endpoints: [a:1]\n- name: b.test\n  endpoints: [b:1]\n"), uint16(18), uint8(6), "\"b")
	f.Fuzz(func(t *testing.T, before []byte, at uint16, cut uint8, put string) {
		from := min(int(at), len(before))
		to := min(from+int(cut), len(before))
		after := bytes.Join([][]byte{before[:from], []byte(put), before[to:]}, nil)
		if d := again(before, after); d != nil {
			wantSame(t, d, after)
		}
	})
}

func BenchmarkReload(b *testing.B) {
	var text strings.Builder
	text.WriteString("services:\n")
	for i := range 100_000 {
		fmt.Fprintf(&text, "  - name: s%d.test\n    endpoints: [\"10.0.0.1:443\"]\n", i)
	}
	path := filepath.Join(b.TempDir(), "culvert.yaml")
	texts := []string{text.String(), strings.Replace(text.String(), "10.0.0.1", "10.0.0.2", 1)}
	var c *Config
	for n := 0; b.Loop(); n++ {
		if err := os.WriteFile(path, []byte(texts[n%2]), 0o600); err != nil {
			b.Fatal(err)
		}
		var err error
		if c, err = Reload(path, c); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkReloadPolicies changes one of 10,000 policies beside 100,000 services, and does
// all that a reload does until the next table stands: it reads the file, merges and swaps.
func BenchmarkReloadPolicies(b *testing.B) {
	var text strings.Builder
	text.WriteString("policies:\n")
	for i := range 10_000 {
		target := fmt.Sprintf("names: [s%d.test]", i)
		if i%2 == 0 {
			target = fmt.Sprintf("services: [s%d.test, s%d.test]", i, i+50_000)
		}
		fmt.Fprintf(&text, "  - {name: p%d, action: allow, targets: {%s}, rules: [{sources: [{spiffe: [spiffe://corp.example/ns/n%d/sa/api]}, {cidrs: [10.0.0.1/32]}], ports: [443]}]}\n", i, target, i)
	}
	text.WriteString("services:\n")
	for i := range 100_000 {
		fmt.Fprintf(&text, "  - name: s%d.test\n    endpoints: [\"10.0.0.1:443\"]\n", i)
	}
	path := filepath.Join(b.TempDir(), "culvert.yaml")
	texts := []string{text.String(), strings.Replace(text.String(), "10.0.0.1/32", "10.0.0.2/32", 1)}
	r := &registry.Registry{}
	var c *Config
	reload := func(text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			b.Fatal(err)
		}
		var err error
		if c, err = Reload(path, c); err != nil {
			b.Fatal(err)
		}
		table, err := r.Merge(c.Snapshot())
		if err != nil {
			b.Fatal(err)
		}
		r.Swap(table)
		if got := len(r.Table().Policies()); got != 10_000 {
			b.Fatalf("got %d policies", got)
		}
	}
	reload(texts[1])
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		reload(texts[n%2])
	}
}
