// Command render renders the chart with Helm's engine: to standard output, or,
// with -write, into deploy/kustomize, which "make manifests" calls.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"culvert.dev/integration/deploy/chart"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}

func run() error {
	r := chart.Release{CreateNamespace: true}
	var sets []string
	root := flag.String("root", "../..", "the repository")
	write := flag.Bool("write", false, "write the files of deploy/kustomize")
	file := flag.String("values", "", "a file of values")
	flag.StringVar(&r.Name, "name", "culvert", "release name")
	flag.StringVar(&r.Namespace, "namespace", "culvert-system", "namespace")
	flag.Func("set", "KEY.KEY=VALUE over the values, VALUE in YAML; repeatable", func(s string) error {
		sets = append(sets, s)
		return nil
	})
	flag.Parse()
	c, err := chart.Load(*root)
	if err != nil {
		return err
	}
	if *write {
		files, err := chart.Files(c)
		if err != nil {
			return err
		}
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(*root, "deploy", "kustomize", filepath.FromSlash(name)), []byte(text), 0o644); err != nil {
				return err
			}
		}
		return nil
	}
	values, err := chart.Values(*file, sets)
	if err != nil {
		return err
	}
	text, err := chart.Render(c, r, values)
	if err == nil {
		_, err = os.Stdout.WriteString(text)
	}
	return err
}
