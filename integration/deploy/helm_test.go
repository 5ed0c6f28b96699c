package deploy

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	release "helm.sh/helm/v4/pkg/release/v1/util"

	culvert "culvert.dev/deploy"
)

// root is the project's folder.
var root = filepath.Join("..", "..")

func loadChart(t *testing.T) *chart.Chart {
	t.Helper()
	c, err := loader.LoadDir(filepath.Join(root, "deploy", "helm", "culvert"))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	return c
}

// byHelm are the documents that Helm makes of values over the chart's.
func byHelm(c *chart.Chart, over map[string]any) ([]string, error) {
	values, err := util.ToRenderValues(c, over, common.ReleaseOptions{Name: "culvert", Namespace: "culvert-system", Revision: 1, IsInstall: true}, nil)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(c, values)
	if err != nil {
		return nil, err
	}
	for name := range files {
		if strings.HasSuffix(name, "NOTES.txt") {
			if strings.Contains(files[name], "<") {
				return nil, fmt.Errorf("notes: %s", files[name])
			}
			delete(files, name)
		}
	}
	_, manifests, err := release.SortManifests(files, nil, release.InstallOrder)
	if err != nil {
		return nil, err
	}
	var docs []string
	for _, m := range manifests {
		docs = append(docs, strings.TrimSpace(m.Content)+"\n")
	}
	return docs, nil
}

// byCulvert are the documents that culvert makes of the same.
func byCulvert(over map[string]any) ([]string, error) {
	values, err := culvert.Defaults()
	if err != nil {
		return nil, err
	}
	culvert.Merge(values, over)
	objects, err := culvert.Render(culvert.Release{Name: "culvert", Namespace: "culvert-system"}, values)
	if err != nil {
		return nil, err
	}
	var docs []string
	for _, o := range objects {
		docs = append(docs, o.Text)
	}
	return docs, nil
}

// Helm and culvert make the same of the same values, byte by byte: of every file
// of good values, and of every feature with every other.
func TestHelmMakesTheSame(t *testing.T) {
	c := loadChart(t)
	same := func(t *testing.T, over func() map[string]any) {
		t.Helper()
		want, err := byHelm(c, over())
		if err != nil {
			t.Fatal(err)
		}
		got, err := byCulvert(over())
		if err != nil {
			t.Fatal(err)
		}
		// The order within a kind is Helm's own: of the files, and then by name.
		slices.Sort(want)
		slices.Sort(got)
		if len(got) != len(want) {
			t.Fatalf("%d objects, by Helm %d", len(got), len(want))
		}
		for i := range want {
			if got[i] != want[i] {
				t.Errorf("got:\n%s\nby Helm:\n%s", got[i], want[i])
			}
		}
	}
	files, err := filepath.Glob(filepath.Join(root, "deploy", "testdata", "good", "*.yaml"))
	if err != nil || len(files) < 5 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, f := range files {
		t.Run(filepath.Base(f), func(t *testing.T) {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			same(t, func() map[string]any {
				v, err := culvert.ParseValues(text)
				if err != nil {
					t.Fatal(err)
				}
				return v
			})
		})
	}
	features := []string{
		"gateway.kind=DaemonSet", "dns.enabled=true", "namespaces=[shop, stock]", "gatewayAPI.enabled=true", "multiCluster.enabled=true",
		"gateway.hostNetwork=true", "serviceMonitor.enabled=true", "discovery.clusters=remote",
	}
	for bits := range 1 << len(features) {
		same(t, func() map[string]any {
			over := map[string]any{}
			for i, f := range features {
				if bits>>i&1 == 0 {
					continue
				}
				if err := culvert.Set(over, f); err != nil {
					t.Fatal(err)
				}
			}
			return over
		})
		if t.Failed() {
			t.Fatalf("features %08b of %q, the last one first", bits, features)
		}
	}
}

// Objects come in the order in which Helm creates them.
func TestTheOrderIsHelms(t *testing.T) {
	over := func() map[string]any {
		v := map[string]any{}
		for _, s := range []string{"dns.enabled=true", "gatewayAPI.enabled=true", "serviceMonitor.enabled=true", "namespaces=[shop]"} {
			if err := culvert.Set(v, s); err != nil {
				t.Fatal(err)
			}
		}
		return v
	}
	kinds := func(docs []string, err error) (out []string) {
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range docs {
			for line := range strings.Lines(d) {
				if kind, ok := strings.CutPrefix(line, "kind: "); ok {
					out = append(out, kind)
				}
			}
		}
		return out
	}
	want := kinds(byHelm(loadChart(t), over()))
	got := kinds(byCulvert(over()))
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// What culvert says of values, Helm says of them, too: good or bad.
func TestHelmRefusesTheSame(t *testing.T) {
	c := loadChart(t)
	text, err := os.ReadFile(filepath.Join(root, "deploy", "testdata", "bad-values"))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(text)) {
		set, _, _ := strings.Cut(strings.TrimSpace(line), " | ")
		if strings.HasSuffix(set, "=null") {
			continue // takes a default away here, and Helm's own way to do so is the next test's
		}
		over := map[string]any{}
		if err := culvert.Set(over, set); err != nil {
			t.Fatal(err)
		}
		if _, err := byHelm(c, over); err == nil || !strings.Contains(err.Error(), "schema") {
			t.Errorf("%s: Helm says %v", set, err)
		}
		n++
	}
	if n < 20 {
		t.Errorf("%d lines", n)
	}
}

// A null of the user's takes a default away.
func TestNullTakesAway(t *testing.T) {
	c := loadChart(t)
	for _, text := range []string{"gateway: null", "cluster: null", "gateway: {replicas: null}"} {
		for name, made := range map[string]func(map[string]any) ([]string, error){
			"Helm": func(v map[string]any) ([]string, error) { return byHelm(c, v) }, "culvert": byCulvert,
		} {
			over, err := culvert.ParseValues([]byte(text))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := made(over); err == nil {
				t.Errorf("%s takes %q", name, text)
			}
		}
	}
}
