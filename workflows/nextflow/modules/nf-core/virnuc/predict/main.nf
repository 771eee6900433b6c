process VIRNUC_PREDICT {
    tag "$meta.id"
    label 'process_medium'

    conda "${moduleDir}/environment.yml"
    container "${ workflow.containerEngine in ['singularity', 'apptainer'] && !task.ext.singularity_pull_docker_container ?
        'https://depot.galaxyproject.org/singularity/virnuc:0.1.0--pyhdfd78af_0':
        'quay.io/biocontainers/virnuc:0.1.0--pyhdfd78af_0' }"

    input:
    tuple val(meta), path(fasta)

    output:
    tuple val(meta), path("${prefix}/virus_summary.tsv"), emit: summary
    tuple val(meta), path("${prefix}/virus.fa.gz")      , emit: virus_fasta
    tuple val(meta), path("${prefix}/virus.gff3")       , emit: virus_gff
    tuple val(meta), path("${prefix}/contigs.tsv")      , emit: contigs
    tuple val(meta), path("${prefix}/chunks.tsv")       , emit: chunks
    tuple val(meta), path("${prefix}/rejected.tsv")     , emit: rejected
    tuple val(meta), path("${prefix}/embeddings.h5")    , emit: embeddings
    tuple val(meta), path("${prefix}/report.html")      , emit: report
    tuple val(meta), path("${prefix}/run.json")         , emit: run
    tuple val(meta), path("${prefix}/virnuc_mqc.json")  , emit: multiqc
    tuple val("${task.process}"), val('virnuc'), eval("virnuc --version | sed 's/virnuc, version //'"), topic: versions, emit: versions_virnuc

    when:
    task.ext.when == null || task.ext.when

    script:
    def args = task.ext.args ?: ''
    def devices = task.accelerator ? 'auto' : 'cpu'
    prefix = task.ext.prefix ?: "${meta.id}"
    """
    export VIRNUC_THREADS=$task.cpus
    export VIRNUC_HOME="\$PWD/virnuc_home"

    virnuc predict \\
        $fasta \\
        --out $prefix \\
        --devices $devices \\
        $args
    """

    stub:
    prefix = task.ext.prefix ?: "${meta.id}"
    """
    mkdir $prefix
    echo "" | gzip > ${prefix}/virus.fa.gz
    touch ${prefix}/virus_summary.tsv ${prefix}/virus.gff3 ${prefix}/contigs.tsv ${prefix}/chunks.tsv
    touch ${prefix}/rejected.tsv ${prefix}/embeddings.h5 ${prefix}/report.html ${prefix}/run.json ${prefix}/virnuc_mqc.json
    """
}
